"""Cuts of large networks one block at a time, with the factors of one block in memory."""
