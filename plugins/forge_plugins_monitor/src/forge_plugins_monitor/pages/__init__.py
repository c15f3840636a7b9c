"""The pages of the documentation, to be read in a terminal without a network."""
