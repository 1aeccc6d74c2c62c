"""Models, layouts and steps that tests of several rooms go through."""
