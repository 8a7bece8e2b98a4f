"""What the command `python -m blockres.train` is made of."""
