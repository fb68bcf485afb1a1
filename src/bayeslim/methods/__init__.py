"""Methods: ways to a posterior, one file each, with what several of them share in `shared/`."""
