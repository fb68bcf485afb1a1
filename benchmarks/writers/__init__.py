"""Writers of the generated tables: one function a block, from the content of a result file to Markdown."""
