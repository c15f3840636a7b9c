"""Operations for the forward of any module: sums over ranks and sequences, losses attached to activations."""
