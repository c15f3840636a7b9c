"""What a hidden state says in the words of the vocabulary."""
