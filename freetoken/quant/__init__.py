"""Weight formats: record layouts and reference dequantisation, one file a format."""
