"""Evidence: estimates and bounds of log p(D), and priors tuned by it."""
