"""What the papers prove, as code to call on your own model."""
