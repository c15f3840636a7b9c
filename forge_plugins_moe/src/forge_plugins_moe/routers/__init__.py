"""Routers, one a file.

Shapes in all of them: T = tokens of a microbatch, D = width of the residual stream, E = experts, K = experts a token.
"""
