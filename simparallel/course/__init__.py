"""The course: exercises of the lessons, and wrong programs to learn from."""
