"""What a model needs: memory on each GPU, floating-point operations, time. Arithmetic alone, and no torch."""
