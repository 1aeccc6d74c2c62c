def page() -> str:
    return "# Metrics\n"
