"""Long runs with every part real: under faults (`storm`) and for hours (`soak`)."""
