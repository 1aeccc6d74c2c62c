"""The tool `python`: programs of the policy, run by bubblewrap without network, files or secrets."""
