"""Completion of what one types behind ``forge``, in bash, zsh and fish."""
