"""TOML in, typed job out."""
