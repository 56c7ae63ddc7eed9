"""Where expert parameters live (homes), and how they reach the ranks that compute with them (slots) and return."""
