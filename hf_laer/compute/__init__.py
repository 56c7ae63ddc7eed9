"""The experts' arithmetic: grouped products, the gated MLP and its explicit backward, gathers and sums of rows."""
