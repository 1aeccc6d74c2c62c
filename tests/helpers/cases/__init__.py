"""Models, layouts and optimizer steps on which tests of several rooms run."""
