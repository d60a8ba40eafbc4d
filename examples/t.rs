use walk::linalg::*;
fn main(){ for e in engines(){ for (m,n,k) in [(1024usize,256usize,256usize),(2048,2048,512)] { let a=vec![0.5f32;m*k]; let b=vec![0.25f32;k*n]; let mut c=vec![0f32;m*n];
 if e==Engine::Portable && m>1500 {continue}
 let t=std::time::Instant::now(); for _ in 0..5 { matmul_f32_with(e,(m,n,k),View::rows(&a,k),View::rows(&b,n),&mut c,n);} let s=t.elapsed().as_secs_f64()/5.; println!("{e:?} {m} {n} {k}: {:.1} GFLOPS", 2.*(m*n*k) as f64/s/1e9); } }
 let (r,k)=(256usize,512usize); let x=vec![0.5f64;r*k]; let mut c=vec![0f64;k*k]; let t=std::time::Instant::now(); for _ in 0..10 {syrk_f64(r,k,&x,&mut c);} let s=t.elapsed().as_secs_f64()/10.; println!("syrk {:.1} GFLOPS useful", (r*k*k) as f64/s/1e9);
}
