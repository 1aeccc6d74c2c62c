"""All refusals before a run starts:
what the configuration, the model, the data and the machine do not allow together.
"""
