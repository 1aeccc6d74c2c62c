"""Independent references: methods in fp64, other projects' losses and quantisers, libraries' sources."""
