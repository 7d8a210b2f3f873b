"""Models of other programs: families (names of tensors and settings) and Hugging Face folders. Imports no MindSpore."""
