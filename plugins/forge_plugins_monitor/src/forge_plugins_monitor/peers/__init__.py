"""Watches over the ranks of a run: signs of life, who is missing, and the end of a rank that waits in vain."""
