"""The registry of classes by name, folders on disk, and `save` and `load`."""
