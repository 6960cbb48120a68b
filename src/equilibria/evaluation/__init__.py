"""How good is a trained network: accuracy, calibration, robustness, certificates."""
