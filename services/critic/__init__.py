"""The critic role."""
