"""Archive formats (zip, tar and folder): strict readers, and writers."""
