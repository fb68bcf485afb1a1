"""Saving: the registry of classes by name, the files on disk, and `save` and `load`."""
