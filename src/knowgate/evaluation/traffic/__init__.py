"""What another threshold would have done to logged traffic."""
