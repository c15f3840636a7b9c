"""What can be read out of a site."""
