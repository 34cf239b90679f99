# A chemist with SMILES: molecules of different lengths, compressed; which samples are valid, unique, novel?
gzip --keep molecules.smi
! sedd train molecules.smi.gz --packing lines --seq-len 4 --out short
sedd train molecules.smi.gz --recipe molecules --out run --minutes 1.5 --set model.width=96 --set model.depth=3
sedd info run
sedd sample run -n 8
sedd quality run -n 200
sedd quality run -n 50 --molecules --known molecules.smi --json
sedd infill run "CC{6}O" -n 3
sedd score run "CCO" "OCC" "C(C"
sedd eval run --draws 2
