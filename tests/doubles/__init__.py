"""Stand-ins: a device, FAISS on a GPU, a clock, and builds of an index that wait."""
