"""Every layout against one process: the cells of the matrix, the launcher that runs them, and what is compared.

A plugin as well, of which only the processes of a launch know; it is not installed.
"""
