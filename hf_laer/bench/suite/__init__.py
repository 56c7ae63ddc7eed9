"""The papers' own comparisons on the GPUs at hand, cell by cell, so that what is done stays done."""
