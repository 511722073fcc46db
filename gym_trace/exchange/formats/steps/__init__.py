"""Steps as JSON lines, CSV and npz, in bounded memory."""
