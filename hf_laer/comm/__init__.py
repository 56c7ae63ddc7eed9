"""Groups of ranks and what they exchange: one interface, one file per back end."""
