"""Train a network: Lightning underneath, one configuration on top."""
