"""The values role: values of responses, with weights of a critic."""
