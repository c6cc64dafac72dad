"""Auto-mapping (HybridFlow, section 6): finds placement, allocation and parallelism of the models of an algorithm by
simulating costs. Pure functions but for reading files; docs/mapping.md says how to use it and what it leaves out."""
