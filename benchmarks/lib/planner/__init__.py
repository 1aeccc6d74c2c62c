"""Layouts whose rehearsed memory is compared with the planner's."""
