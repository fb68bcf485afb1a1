"""Export to C: a network as one self-contained C99 file and a header."""
