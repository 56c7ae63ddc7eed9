"""What the engine did, in numbers: records per layer and micro-batch, their summary, a table and a picture."""
