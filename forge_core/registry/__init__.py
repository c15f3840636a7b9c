"""The installed plugins: they are found, their components listed by kind and name, and built."""
