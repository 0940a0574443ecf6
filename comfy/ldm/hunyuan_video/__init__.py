"""Networks of HunyuanVideo."""
