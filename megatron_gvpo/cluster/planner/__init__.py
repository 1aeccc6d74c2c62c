"""What to expect of a cluster before there is one: memory and step time for every legal layout.

Pure Python on published numbers: everything it says is predicted. docs/explanation/planner.md says how well.
"""
