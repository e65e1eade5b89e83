"""Layout of the bytes that carry rows and sums between ranks: headers, sizes and memory."""
