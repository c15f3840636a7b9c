"""The order of the samples: a permutation, a stream over positions, and the loader that reads ahead.

Everything here is a function of (seed, position). The only state of a run's data is one number.
"""
