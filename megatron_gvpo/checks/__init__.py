"""All checks that can refuse a run before it starts: of configuration, model, data and machine."""
