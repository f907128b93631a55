"""Archives as bytes: strict readers of zip, tar and folders, and their writers."""
