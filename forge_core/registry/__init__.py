"""What is installed: plugins are found, their components listed by kind and name, and built."""
