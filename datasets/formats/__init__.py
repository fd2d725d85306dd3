"""Sources of rows: file formats, tables, data sets of other libraries."""
