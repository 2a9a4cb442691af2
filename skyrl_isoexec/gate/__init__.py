"""Gates: runnable proofs that an implementation gives the bits it is defined to give, and the records they leave."""
