"""Programs that tests run by their path, in processes and environments of their own."""
